"""The games behind other APIs, one in each module: Gymnasium, PettingZoo, vector, functional. No game rules."""
