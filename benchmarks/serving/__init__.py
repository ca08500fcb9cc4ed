"""The serving benchmark: workloads, the loop that replays them, the HTTP client and the numbers."""
