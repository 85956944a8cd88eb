"""FX passes: where a model's parameters are gathered and released, where gradients are reduced, and in which order.

A pass is ``apply(graph, context, phase) -> Report``. It checks its requirements, changes the graph that it is given,
and reports what it did. It calls no collective and holds no tensor and no process group. Nodes carry their
:class:`Role`, and buckets are plain data in the :class:`Context`.

    Dynamo's graph      unshard     replace shells by one differentiable ``gather`` per bucket
    joint graph         reshard     tag what the partitioner must not save for backward
    forward and         portions    (optional) keep a portion of each gathered bucket; backward gathers the portions
    backward
    backward            reduce      place the starts and waits of reductions
    forward, backward   schedule    place the starts and waits of gathers
    and inference       comm_buffers    (optional) gather into communication buffers
                        (your own)  ``options={"passes": [...]}``
                        verify      check that the schedule is correct
                        announce    make the graph announce its schedule before it runs

A :class:`~.context.Feature` that an option asks for adds passes at its own places, see :mod:`.guests`:

    fp8_matmul          Dynamo's graph          let linear layers compute their products in float8
    loss_chunks         joint graph             compute the loss in chunks of tokens
    activations         forward and backward    keep what is saved for backward in host memory
    float32_gradients   backward                let matmuls write gradients in float32

The decisions that steer the passes are made beforehand, by a :class:`~.producer.Producer`: the policy's numbers, a
schedule file, or the solver, whose modules can be inspected one by one. :mod:`.guests.solver.costs` estimates kernels
and collectives on a machine described by :mod:`.guests.solver.hardware`. :mod:`.guests.solver.flow` derives a graph's
use of time and memory, and :mod:`.guests.solver.outline` condenses it. :mod:`.guests.solver.simulate` simulates a step,
:mod:`.guests.solver.solve` finds a schedule within a memory budget, and :mod:`.guests.solver.across_ranks` makes all
ranks decide the same.
"""
