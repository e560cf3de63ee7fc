"""Multiple-choice benchmarks: local files to questions to prompts, scored in large batches, logged item by item."""
