"""Take page objects from the host arena into device pools, as a server does, and back.

A page object proves itself only where attention reads it. So `verify --device` sends every object
the whole way and looks at the far end:

    store ─► arena (page-locked once) ─► staging ─► layer-first pools ─► checks of values, order
                                            ▲              │
                                            └── gathered ◄─┘ ─► digest ─► catalog

A **lane** is one stream with a staging and a pool buffer; lanes are all the device memory there is
(`--device-bytes`), whatever the store's size. The thread that read a slab takes a free lane, sends
the slab with one copy, replays the launches behind it, waits for one event, and gives the lane
back; so reads, copies and kernels of different slabs overlap, and a thread that waits for a lane
waits for work that ends by itself. The staging buffer is poisoned before pages are gathered back
into it: a digest is over bytes that came out of the pools.

Where to put what is a `CopyPlan`, made once for each kind of object from its `TensorLayout`s, and
applied to any slots by a provider: SGLang's own kernels, Triton, or plain torch. What an object's
form needs of a lane is a `DeviceRun`; its launches are captured once, since Python would take
longer to launch them than the device to run them.

Device kernels only say which objects to suspect. What is wrong with them, the CPU checks say, from
the bytes that are still in the arena: findings are the same, word for word, as without a device.
Checks without a kernel see every object there, so that `--device` leaves no check out.
Where the host finds nothing in an object of which the device says that it must, the device, or the
way to it, damages data: that ends the run.

Nothing here is imported before a device is asked for: torch and triton are optional.
"""
