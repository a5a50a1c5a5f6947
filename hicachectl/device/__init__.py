"""Move page objects from the host arena into device pools, as a server does, and back.

A server computes with the bytes in its device pools. So `verify --device` checks the bytes in such
pools:

    store ─► arena (page-locked once) ─► staging ─► layer-first pools ─► checks of values, order
                                            ▲              │
                                            └── gathered ◄─┘ ─► digest ─► catalog

A **slab** is the objects of one read task, or of a part of the task if memory is short. A **lane**
is one CUDA stream with a staging buffer and a pool buffer, for one slab at a time. A run allocates
its lanes once, within `--device-bytes`, whatever the store's size. Forked processes read slabs into
the arena, because reads of many threads would wait for Python's lock. These processes share the
arena with the command. For each slab, a thread of the command

- waits until the slab is read
- takes a free lane
- copies the slab to the device
- replays the captured launches
- waits for one event
- returns the lane

So reads, copies and kernels of different slabs overlap. A thread with a lane waits for no other
lane, so threads do not deadlock. Staging is overwritten with a fixed byte before pages are gathered
back, so a digest covers only bytes from the pools.

A `CopyPlan` maps the bytes of an object to pool slots. It is computed once for each kind of object,
from the `TensorLayout`s of the kind. A Triton kernel carries out the plan. A `DeviceRun` prepares a
lane for one form of object. Its launches are captured in a CUDA graph, because a launch from Python
takes longer than the kernel itself.

Device kernels only flag suspects. The CPU checks examine the suspects' bytes, which are still in
the arena. So findings are the same as without a device, word for word. Checks without a kernel
examine every object on the CPU, so `--device` skips no check. If a kernel reports a definite fault
and the CPU finds no fault, the device or the transfer damages data. The run then ends, or continues
on the CPU if `--device auto` is given.

torch and triton are optional, so nothing imports them before a device is requested.
"""
