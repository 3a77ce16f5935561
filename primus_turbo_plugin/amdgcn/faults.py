"""What can go wrong while AMDGCN text is read or emulated.

All of these name the instruction, its line in the assembly text and, where the compiler left `.loc` records, the line
of the kernel's own source.
"""

from __future__ import annotations

from primus_turbo_plugin.errors import TurboError


class AssemblyError(TurboError, ValueError):
    """The assembly text, or an operand or modifier in it, is not understood."""


class EmulationError(TurboError, RuntimeError):
    """The emulated kernel did something it must not do, or the emulator cannot continue."""


class UnknownInstructionError(EmulationError):
    """The kernel holds instructions (or modifiers of them) the emulator has no meaning for; all of them are listed."""


class OutOfBoundsError(EmulationError, IndexError):
    """An access outside every registered buffer, outside the group's LDS or outside a lane's scratch."""


class MissingWaitError(EmulationError):
    """A register was used while the load that fills it was still outstanding on its wait counter."""


class RaceError(EmulationError):
    """Two waves touched the same LDS bytes, at least one writing, with no barrier between them."""


class DeadlockError(EmulationError):
    """No wave can make progress, or the step limit was reached."""


class TrapError(EmulationError):
    """The kernel executed `s_trap` (a failed device assertion)."""
