"""The paged KV cache: block ids and the tensors behind them."""
