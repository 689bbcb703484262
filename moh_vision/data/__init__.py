"""Images: `sources` hold them, `order` says which comes when, and `batches` makes the batches of a step."""
