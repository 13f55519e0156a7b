"""Runs on hosts that come and go: `fnet run --elastic` supervises one process on each host.

- `_board`: a shared folder, in which hosts leave notes for each other.
- `_membership`: who is there, and when the hosts begin again together.
- `_process`: the process of this host.
- `_host`: the loop of a host.
"""
