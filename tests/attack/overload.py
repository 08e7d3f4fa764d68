def attack(folder, rng): return []
