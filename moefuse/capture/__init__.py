"""Data-dependent expert loops without a graph break, for frames that moefuse's own backend compiles.

Dynamo stops at ``for e in mask.nonzero():`` and at ``if idx.numel() > 0:``. Here it goes on under an **assumption**: every expert is
visited, every expert has tokens. That is wrong for an expert without tokens, unless what depends on the assumption comes to nothing for
such an expert. So each assumption has a **scope**, the part of the program between the branch and where its two ways meet again, and is
*discharged* when

* the branch or the loop asks exactly whether some token chose expert e (a fact of the graph, see docs/design/capture.md),
* everything the graph does in the scope ended up in a fused region, as the share of that same expert,
* nothing of Python's state differs at the end of the scope: live locals, the stack, and objects from outside it are what they were.

If not, Dynamo starts the frame again, and this statement breaks the graph as it would without moefuse. The order of the modules:
``bytecode`` (where ways meet, what is live), ``assumptions`` (the records), ``frame`` (what happens before each instruction).
"""

from moefuse.capture.frame import Frame
from moefuse.capture.ledger import Ledger
from moefuse.passes.graph.assumptions import Assumption, Undischarged

__all__ = ["Assumption", "Frame", "Ledger", "Undischarged"]
