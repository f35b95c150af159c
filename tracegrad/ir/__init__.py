"""The representation of a traced program: `Graph`, its values and its five kinds of node."""

from tracegrad.ir.errors import GraphError as GraphError
from tracegrad.ir.errors import NoMatchError as NoMatchError
from tracegrad.ir.graph import Graph as Graph
from tracegrad.ir.nodes import Apply as Apply
from tracegrad.ir.nodes import Atom as Atom
from tracegrad.ir.nodes import Call as Call
from tracegrad.ir.nodes import CustomGradient as CustomGradient
from tracegrad.ir.nodes import Literal as Literal
from tracegrad.ir.nodes import Node as Node
from tracegrad.ir.nodes import Recompute as Recompute
from tracegrad.ir.nodes import RegionNode as RegionNode
from tracegrad.ir.nodes import Source as Source
from tracegrad.ir.nodes import StopGradient as StopGradient
from tracegrad.ir.nodes import Value as Value
from tracegrad.ir.nodes import dtype_of as dtype_of
from tracegrad.ir.nodes import has_gradient as has_gradient
from tracegrad.ir.nodes import is_reference as is_reference
from tracegrad.ir.occurrence import Fragment as Fragment
from tracegrad.ir.occurrence import Matches as Matches
from tracegrad.ir.occurrence import Occurrence as Occurrence
from tracegrad.ir.occurrence import Origin as Origin
