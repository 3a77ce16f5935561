"""Transports: how rows get from one rank to another while the caller computes."""

from primus_turbo_plugin.communication.transports.base import Arena, Capabilities, Expected, Transport

__all__ = ["Arena", "Capabilities", "Expected", "Transport"]
