"""The update path under FSDP2, part by part: what ``bench_update_path.py`` runs on each rank, and how it counts."""
