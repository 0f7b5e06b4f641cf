"""`offload train`: a causal language model trained or fine-tuned on documents or text.

options ──► job ──► loop        what was asked for; checked and built; trained, a report a step
             │
             ├─ data: documents ─ packing, or token_stream; evaluation: what is held out
             ├─ model ─ lora
             └─ identity, output: whose run and whose folder it is
"""
