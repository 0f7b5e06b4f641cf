"""Text and records for fine-tuning: files, documents, sequences of tokens, and their memory."""
