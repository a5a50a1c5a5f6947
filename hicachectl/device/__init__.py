"""Move page objects from the host arena into device pools, as a server does, and back.

A server computes with the bytes in its device pools. So `verify --device` checks the bytes there:

    store ─► arena (page-locked once) ─► staging ─► layer-first pools ─► checks of values, order
                                            ▲              │
                                            └── gathered ◄─┘ ─► digest ─► catalog

A **slab** is the objects of one read task, or of a part if memory is short. A **lane** is one CUDA
stream with a staging buffer and a pool buffer, for one slab at a time. A run allocates its lanes
once, within `--device-bytes`, whatever the store's size. Forked processes read slabs into the
arena, which they share with the command, because reads of many threads wait for Python's lock. A
thread waits for the read of its slab, takes a free lane, copies the slab to the device, replays the
captured launches, waits for one event and returns the lane. So reads, copies and kernels of
different slabs overlap. A thread with a lane waits for no other lane, so threads do not deadlock.
Staging is poisoned before pages are gathered back, so a digest covers only bytes from the pools.

A `CopyPlan`, computed once per kind of object from its `TensorLayout`s, maps object bytes to pool
slots. A Triton kernel carries out the plan. A `DeviceRun` prepares a lane for one form of object.
Its launches are captured in a CUDA graph, because a launch from Python takes longer than the kernel
itself.

Device kernels only flag suspects. The CPU checks examine the suspects' bytes, still in the arena,
so findings are the same as without a device, word for word. Checks without a kernel examine every
object on the CPU, so `--device` skips no check. If a kernel reports a definite fault and the CPU
finds none, the device or the transfer damages data: the run ends, or continues on the CPU with
`--device auto`.

torch and triton are optional: nothing imports them before a device is requested.
"""
