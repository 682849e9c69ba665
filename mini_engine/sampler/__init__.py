"""L4: from logits to token ids: parameters, the batch of rows, processors, filters, the draw and log-probabilities."""
