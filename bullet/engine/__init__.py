"""A small real engine: model, weights, paged KV, graphs."""
