"""Published tables and our own measurements beside what the advisor predicts."""
