"""The parts of gpu_session.py: what is run on a GPU, measured, recorded and judged, each in a child process."""
