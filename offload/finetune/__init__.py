"""`offload train`: training and fine-tuning of a causal language model on documents or text.

options ──► job ──► loop        options and config; checks and construction; steps, with one report each
             │
             ├─ data: documents ─ packing, or token_stream, with held-out sequences
             ├─ model, with adapters of --lora, and the kernels of its blocks
             └─ output: identity of the job, owner of the run and of the output folder
"""
