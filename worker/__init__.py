"""The worker: model, paged KV pool, decode plans and the scheduler over them."""
