"""One folder for each backend: ``unavailable_reason(device_type)`` and ``KERNELS``, primitive -> callable."""
