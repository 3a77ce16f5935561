"""Support for our entry scripts: devices, launching, data, progress."""
