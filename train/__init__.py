"""The trainer: k chained MTP modules on the hidden states of a frozen causal LM, in a deepspeed engine.

Order of reading: ``config`` (what a run is), ``data`` (text to packed rows), ``teacher`` (the target's
side of a batch), ``objective`` (the loss), ``engine`` (the only file that knows deepspeed), ``trainer``
(the loop), ``runs`` (checkpoints and resume), ``evaluate`` (replay), ``tracking`` (logs), ``partition``
(the target in parts, for ZeRO stage 3), ``estimate`` (what ``--dry-run`` prints).
"""
