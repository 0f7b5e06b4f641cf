"""Offline inference, `offload score` and `offload generate`: a folder's model over the records of files.

open_model    folder ─► engine and tokenizer
rows          record ─► rows of tokens ─► padded batches
finite        the check that logits are numbers
score         log-likelihood or reward of each record
generate      text that continues each prompt
"""
