"""A simulated engine: vLLM's hybrid scheduling in miniature, deterministic, without torch.

It writes the records that a real engine writes. Its "model" makes every mistake about state
visible in the output:

- a recurrent state is a chain over tokens, invertible in every argument: a state that is
  wrong once stays wrong, and a token applied twice is another state; a convolution's window of
  the last tokens lies beside it, and what drops out of the window enters the chain;
- an attention page holds one slot per token; a token written twice into its slot does no harm;
- there are two recurrent groups, and every rank has its own shard of everything; the next token
  hashes all of it.

As in vLLM's align mode, slot k of a recurrent table holds a state only if a scheduled chunk
ended at (k+1)·C tokens. Loads are asynchronous: lookup, allocation, load, completion, and only
then the first batch. Requests that are handed in together share steps, and preempt each other when
blocks run out. With ``num_speculative_tokens`` decoding steps hold drafts, some of which are accepted.
"""

from samestate.engines.sim.blocks import chunk_end
from samestate.engines.sim.conduct import Conduct
from samestate.engines.sim.engine import SimEngine
from samestate.engines.sim.faults import FullLookup
from samestate.engines.sim.state import ATTENTION, EOS, RECURRENT
from samestate.engines.sim.tier import Shelf

__all__ = ["ATTENTION", "EOS", "RECURRENT", "Conduct", "FullLookup", "Shelf", "SimEngine", "chunk_end"]
