"""Images: where they are (`sources`), which comes when (`order`), what a step sees of them (`batches`)."""
