"""How long attention, a layer and a step take, from schedules, sizes and rates."""
