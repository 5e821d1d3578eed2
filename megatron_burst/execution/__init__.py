"""Running a plan: the executor of schedules, attention passes over it, and head exchanges."""
