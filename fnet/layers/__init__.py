from fnet.layers._core import Layer, layer, method
from fnet.layers._linear import Dense, Maxout
from fnet.layers._scope import Scope
from fnet.layers._spec import ParamSpec, Spec
