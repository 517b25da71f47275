"""How many workers a model has: started when there is work, braked when they die of it."""
