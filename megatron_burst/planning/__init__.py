"""From arguments to a plan that every rank agrees on: validate, prepare, plan."""
