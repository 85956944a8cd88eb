"""FX passes: where a model's parameters are gathered and released, where gradients are reduced, and in which order.

A pass is ``apply(graph, context, phase) -> Report``. It checks its requirements, changes the graph that it is given,
and reports what it did. It calls no collective and holds no tensor and no process group. Nodes carry their
:class:`Role`, and buckets are plain data in the :class:`Context`.

    Dynamo's graph      fp8_matmul  (optional) let linear layers compute their products in float8
                        unshard     replace shells by one differentiable ``gather`` per bucket
    joint graph         reshard     tag what the partitioner must not save for backward
    forward and         portions    (optional) keep a portion of each gathered bucket; backward gathers the portions
    backward
    backward            float32_gradients   (optional) let matmuls write gradients in float32
                        reduce      place the starts and waits of reductions
    forward, backward   schedule    place the starts and waits of gathers
    and inference       comm_buffers    (optional) gather into communication buffers
                        (your own)  ``options={"passes": [...]}``
                        verify      check that the schedule is correct
                        announce    make the graph announce its schedule before it runs

The decisions that steer the passes are made beforehand, by modules that can be inspected one by one.
:mod:`.solver.costs` estimates kernels and collectives on a machine described by :mod:`.solver.hardware`.
:mod:`.solver.flow` derives a graph's use of time and memory, and :mod:`.solver.outline` condenses it.
:mod:`.solver.simulate` simulates a step, :mod:`.solver.solve` finds a schedule within a memory budget, and
:mod:`.solver.across_ranks` makes all ranks decide the same. :mod:`.policy` has the numbers that steer them, and
:mod:`.decisions` the result: neither knows a graph.
"""
