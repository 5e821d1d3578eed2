"""What people ask before and after a run: advice, memory, pictures, traces, calibration."""
