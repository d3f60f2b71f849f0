"""Measurements that run in ranks; `scripts/gpu_check` calls them and writes the JSON."""
