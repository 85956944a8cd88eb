"""FX passes: where a model's parameters are gathered, released and reduced, and in which order.

A pass is ``apply(graph, context, phase) -> Report``. It changes the graph that it is given, checks first what it needs, and
says what it did. It calls no collective, holds no tensor and knows no process group: nodes carry their :class:`Role`,
buckets are plain data in the :class:`Context`.

    Dynamo's graph      unshard     shells become one differentiable ``gather`` per bucket
    joint graph         reshard     what the partitioner must not save for backward
    forward and         portions    (an option) a part of what forward gathers stays; backward gathers these parts
    backward
    backward            float32_gradients   (an option) matmuls write gradients in float32
    forward, backward   reduce      where reductions start and are awaited
    and inference       schedule    where gathers start and are awaited
                        (your own)  ``options={"passes": [...]}``
                        verify      that all of this is right
                        announce    the graph says what it does before it does it

What steers them is decided before, and can be looked at: costs of kernels and collectives (:mod:`.costs`, for a machine of
:mod:`.hardware`), what a graph does to time and memory (:mod:`.flow`, in short :mod:`.outline`), a step simulated
(:mod:`.simulate`), a schedule within a memory budget (:mod:`.solve`), what was decided (:mod:`.decisions`), and how ranks decide the
same (:mod:`.across_ranks`).
"""
