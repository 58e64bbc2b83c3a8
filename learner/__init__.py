"""DeepSpeed learner that replays shadow masks in its attention."""
