"""Offline inference, `offload score` and `offload generate`: a folder's model over the records of files.

options       which model, and where
open_model    folder ─► engine, tokenizer and static cache; record ─► rows of tokens; the check that logits are numbers
score         log-likelihood or reward of each record
generate      text that continues each prompt
"""
