"""Twenty tasks in PyTorch."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

x, y = torch.ones(32, 8), torch.arange(32) % 3
images = torch.ones(4, 1, 28, 28)


# %% Define a model
class MLP(nn.Module):
    def __init__(self, inputs, hidden, classes=3):
        super().__init__()
        self.fc = nn.Linear(inputs, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(F.relu(self.fc(x)))


model = MLP(8, 16)

# %% Create the parameters
torch.manual_seed(0)
model = MLP(8, 16)  # the constructor creates the parameters
kernel = model.fc.weight  # [16, 8], transposed

# %% Apply the model
model.eval()
with torch.no_grad():
    logits = model(x)

# %% Count the parameters
count = sum(p.numel() for p in model.parameters())

# %% Choose initializers
dense = nn.Linear(8, 16)
nn.init.kaiming_normal_(dense.weight)
nn.init.constant_(dense.bias, 0.1)

# %% Write a network as a sequence
cnn = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding="same"),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(16 * 14 * 14, 10),
)
cnn_logits = cnn(images)  # channels first

# %% Use dropout
dropout = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5))
noisy = dropout.train()(x)  # uses the global random generator
exact = dropout.eval()(x)

# %% Use batch normalization
normed = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
out = normed.train()(x)  # updates the running statistics in place
out = normed.eval()(x)


# %% Write a layer with a parameter
class Scale(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))

    def forward(self, x):
        return x * self.scale


# %% Share weights
class Autoencoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.shared = nn.Linear(width, width)

    def forward(self, x):
        return self.shared(self.shared(x))


# %% Repeat a block
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + F.relu(self.fc(self.norm(x)))


deep = nn.Sequential(*[Block() for _ in range(12)])

# %% Compute a loss and its gradient
value = F.cross_entropy(model(x), y)
value.backward()
grads = [p.grad for p in model.parameters()]

# %% Write a training step
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(x, y):
    optimizer.zero_grad()
    value = F.cross_entropy(model(x), y)
    value.backward()
    optimizer.step()
    return value


value = step(x, y)  # to compile: torch.compile(model)

# %% Use a schedule and clip gradients
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=10)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90)
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [10])
norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # before optimizer.step()

# %% Train with a ready-made loop
# PyTorch itself contains no training loop.
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True
)
for _ in range(2):
    right = 0
    for inputs, labels in loader:
        step(inputs, labels)
        schedule.step()
        right += (model(inputs).argmax(-1) == labels).sum().item()

# %% Freeze a part of the model
for p in model.fc.parameters():
    p.requires_grad_(False)

# %% Train in mixed precision
with torch.autocast("cpu", torch.bfloat16):
    value = F.cross_entropy(model(x), y)
value.backward()

# %% Save and load
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
restored = torch.load("checkpoint.pt", weights_only=True)
model.load_state_dict(restored["model"])

# %% Read an activation
values = {}
hook = model.fc.register_forward_hook(lambda module, inputs, output: values.update(fc=output))
logits = model(x)
hook.remove()
hidden = values["fc"]

# %% Train on all devices
# Start one process for each device: `torchrun --nproc_per_node=8 train.py`.
import os
import tempfile

rendezvous = tempfile.mkdtemp()
torch.distributed.init_process_group(
    "gloo",
    init_method=f"file://{rendezvous}/store",
    rank=int(os.environ.get("RANK", 0)),
    world_size=int(os.environ.get("WORLD_SIZE", 1)),
)
replica = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
F.cross_entropy(replica(x), y).backward()  # averages the gradients over the devices
torch.distributed.destroy_process_group()
