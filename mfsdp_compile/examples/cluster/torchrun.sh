#!/bin/sh
# Start the training on a node. On every node of the job:
#
#     NODES=2 HEAD=node-a FOLDER=/shared/runs/a sh torchrun.sh --sharding hsdp
#
# NODES      number of nodes; 1:4 if the job may go on with fewer than 4
# HEAD       name or address of the node on which nodes find each other
# FOLDER     for checkpoints, which all nodes see
# RANKS      processes per node (default: one for each GPU)
# PORT       free on HEAD (default: 29500)
# RESTARTS   how often all processes are started again after a failure (default: 3)
# ADDRESS    of this node, if others do not reach it by its host name
# RDZV_CONF  more settings of the rendezvous, such as last_call_timeout=10
set -eu
# Ranks that are started again must not find the addresses of those before them, which torchrun's shared store keeps
# (torch 2.11 to 2.15).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun \
    --nnodes "${NODES:-1}" \
    --nproc-per-node "${RANKS:-gpu}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29500}" \
    --rdzv-id "${JOB:-mfsdp}" \
    ${RDZV_CONF:+--rdzv-conf "$RDZV_CONF"} \
    --max-restarts "${RESTARTS:-3}" \
    ${ADDRESS:+--local-addr "$ADDRESS"} \
    -m mfsdp_compile.examples.cluster.train --folder "$FOLDER" "$@"
