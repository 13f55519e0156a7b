"""Expert parallelism: the experts of `nn.MixtureOfExperts` lie on the devices of a mesh axis, and
tokens travel to them and back by all-to-all. A step is traced with the layer's form for this
(`fnet.layers._experts_apart`); here, a plan learns what such a step has, and what it costs."""
