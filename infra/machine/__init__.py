"""This machine: GPUs as NVML reports them, devices, free ports."""
