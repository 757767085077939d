"""The model: its file, tokenizer, chat template and forward pass. Knows no sessions."""
