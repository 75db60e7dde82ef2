"""Small LightningModules in the styles that are public: what a batch is, what a step calls, how it is optimized."""

import copy
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

SAMPLES, BATCH = 40, 8


class Generated(Dataset[Any]):
    """Samples of one kind."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(3)
        self.kind, self.y = kind, torch.arange(SAMPLES) % 4
        self.images = torch.randn(SAMPLES, 1, 8, 8, generator=generator) + self.y.view(-1, 1, 1, 1)
        self.tokens = torch.randint(0, 16, (SAMPLES, 6), generator=generator)
        self.lengths = 2 + torch.arange(SAMPLES) % 5

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, row: int) -> Any:
        if self.kind == "views":
            return (self.images[row], self.images[row].flip(-1)), self.y[row]
        if self.kind == "text":
            mask = (torch.arange(6) < self.lengths[row]).long()
            return {"input_ids": self.tokens[row], "attention_mask": mask, "labels": self.y[row]}
        if self.kind == "sequence":
            return self.images[row, 0], self.lengths[row], self.y[row]
        if self.kind == "boxes":  # another number in each picture
            return self.images[row], torch.rand(1 + row % 3, 4, generator=torch.Generator().manual_seed(row))
        if self.kind == "series":
            return {"past": self.images[row, 0], "static": self.y[row], "future": self.images[row, 0, -1, :3]}
        return self.images[row], self.y[row]


class Stream(IterableDataset[Any]):
    """Samples in an order of their own, as from a replay buffer."""

    def __iter__(self) -> Any:
        data = Generated("image")
        return (data[row * 7 % SAMPLES] for row in range(SAMPLES))


class Graphs:
    """A batch of a class of its own: features and who is next to whom."""

    def __init__(self, samples: list[Any]) -> None:
        self.nodes = torch.stack([image[0] for image, _ in samples])  # eight nodes of eight features
        self.edges = (self.nodes @ self.nodes.mT > 0).float()
        self.y = torch.stack([y for _, y in samples])


def lists(samples: list[Any]) -> Any:
    """Collate pictures, and a list of their boxes."""
    return torch.stack([image for image, _ in samples]), [boxes for _, boxes in samples]


class Data(LightningDataModule):
    def __init__(self, kind: str = "image") -> None:
        super().__init__()
        self.kind = kind

    def _loader(self, kind: str) -> Any:
        if kind == "stream":
            return DataLoader(Stream(), BATCH, generator=torch.Generator())
        collate: Any = {"graph": Graphs, "boxes": lists}.get(kind)
        return DataLoader(Generated(kind), BATCH, collate_fn=collate, generator=torch.Generator())  # no global draw

    def train_dataloader(self) -> Any:
        if self.kind == "combined":
            return CombinedLoader({"labelled": self._loader("image"), "other": self._loader("image")}, "min_size")
        return self._loader(self.kind)

    def val_dataloader(self) -> Any:
        if self.kind == "several":
            return [self._loader("image"), self._loader("image")]
        return self._loader("image" if self.kind == "combined" else self.kind)

    def predict_dataloader(self) -> Any:
        return self._loader("image" if self.kind in ("combined", "several") else self.kind)


class Base(LightningModule):
    """Adam, and the validation loss under `val_loss`."""

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=0.01)


class Classifier(Base):
    """One child with parameters, logits as `self.model(x)`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4))
        self.criterion = nn.CrossEntropyLoss()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return self.criterion(self.model(x), y)


class Convolutional(Base):
    """Backbone and head, called by the module's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).mean((2, 3)))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class VAE(Base):
    """Noise in the forward pass; outputs are a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 32), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x.flatten(1)).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance

    def loss(self, batch: Any) -> Tensor:
        made, mean, log_variance = self(batch[0])
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.mse_loss(made, batch[0].flatten(1)) + 0.01 * divergence


class GAN(LightningModule):
    """Manual optimization of two nets in turn; no validation of its own but a logged loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, (first, second) = batch[0].flatten(1), self.optimizers()
        self.toggle_optimizer(first)
        fake = self.generator(torch.randn(len(real), 8, device=self.device))
        loss = F.softplus(-self.discriminator(fake)).mean()
        self.log("g_loss", loss)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        found = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake.detach())).mean()
        self.manual_backward(found)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = torch.randn(len(batch[0]), 8, generator=torch.Generator().manual_seed(batch_idx))
        self.log("val_loss", F.softplus(-self.discriminator(self.generator(z))).mean())

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=0.01, weight_decay=0.01) for part in parts], []


class UNet(Base):
    """Segmentation: skip connections, a label per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNetBody()

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), (batch[0][:, 0] > batch[1].view(-1, 1, 1)).long())


class UNetBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x).relu()
        return self.out(torch.cat([skip, self.up(self.inner(skip).relu())], 1))


class Recurrent(Base):
    """A GRU over sequences of different lengths, packed in the forward pass of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = RecurrentBody()

    def loss(self, batch: Any) -> Tensor:
        x, lengths, y = batch
        return F.cross_entropy(self.net(x, lengths), y)


class RecurrentBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][-1])


class LanguageModel(Base):
    """A transformer of torch's own layers, repeated in a ModuleList, with a causal mask as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = Transformer()

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["input_ids"]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1, device=self.device)
        return F.cross_entropy(self.lm(tokens[:, :-1], mask=mask).transpose(1, 2), tokens[:, 1:])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


class TextClassifier(Base):
    """As transformers' models: called with the batch's keywords, outputs a dict with loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TextBody()

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch)["loss"]


class TextBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.dense, self.classifier = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        weights = attention_mask.unsqueeze(-1).float()
        mean = (self.embedding(input_ids) * weights).sum(1) / weights.sum(1)
        logits = self.classifier(self.dense(mean).relu())
        return {"logits": logits} | ({} if labels is None else {"loss": F.cross_entropy(logits, labels)})


class SimCLR(Base):
    """Two views of each sample: the encoder runs twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.projection = nn.Linear(32, 16)

    def loss(self, batch: Any) -> Tensor:
        first, second = (F.normalize(self.projection(self.encoder(view)), dim=1) for view in batch[0])
        return F.cross_entropy(first @ second.T / 0.2, torch.arange(len(first), device=self.device))


class SelfTaught(Base):
    """A student that follows a moving average of itself, updated after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0].flip(-1))
        return F.mse_loss(self.student(batch[0]), target + 0.1 * batch[1].view(-1, 1))

    def on_train_batch_end(self, *_: Any) -> None:
        for mean, value in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.data.lerp_(value.data, 0.1)


class Alternating(LightningModule):
    """Manual optimization: one optimizer steps with every batch, the other with every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        body, head = self.optimizers()
        self.manual_backward(F.cross_entropy(self.head(self.body(batch[0])), batch[1]))
        head.step()
        head.zero_grad()
        if batch_idx % 2:
            body.step()
            body.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.head(self.body(batch[0])), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.body.parameters(), 0.05, 0.9), torch.optim.Adam(self.head.parameters(), 0.01)


class Prepared(Classifier):
    """A step that can't run alone: what it reads is set in a hook of the loop."""

    def on_validation_epoch_start(self) -> None:
        self.scale = 2.0

    def on_train_epoch_start(self) -> None:
        self.scale = 1.0

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self.model(self.scale * batch[0]), batch[1])


class Flow(Base):
    """A normalizing flow of two couplings: the likelihood is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = Couplings()

    def loss(self, batch: Any) -> Tensor:
        z, volume = self.flow(batch[0].flatten(1))
        return (0.5 * z.square().sum(1) - volume).mean() / 64


class Couplings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = x.new_zeros(len(x))
        for net in self.nets:
            first, second = x.chunk(2, 1)
            scale, shift = net(first).chunk(2, 1)
            x, volume = torch.cat([second * scale.tanh().exp() + shift, first], 1), volume + scale.tanh().sum(1)
        return x, volume


class Diffusion(Base):
    """Noise and a time are drawn in the step; the net has two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = Denoiser()

    def loss(self, batch: Any) -> Tensor:
        x, t = batch[0], torch.rand(len(batch[0]), device=self.device)
        noise, share = torch.randn_like(x), t.view(-1, 1, 1, 1)
        return F.mse_loss(self.unet((1 - share) * x + share * noise, t), noise)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.time = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(1, 8)
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.last((self.first(x) + self.time(t.view(-1, 1)).view(-1, 8, 1, 1)).relu())


class Energy(Base):
    """Samples by gradients with respect to the input, in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 1))

    def loss(self, batch: Any) -> Tensor:
        fake = torch.randn_like(batch[0])
        with torch.enable_grad():
            for _ in range(2):
                fake = fake.detach().requires_grad_()
                fake = fake - torch.autograd.grad(self.energy(fake).sum(), fake)[0]
        found, real = self.energy(fake.detach()), self.energy(batch[0])
        return (real - found).mean() + 0.1 * (real.square() + found.square()).mean()


class GraphNet(Base):
    """Batches of a class of their own, which the module moves to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.gnn = MessagePassing()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        batch.nodes, batch.edges, batch.y = (x.to(device) for x in (batch.nodes, batch.edges, batch.y))
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch.y))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch.y))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.gnn(batch.nodes, batch.edges), batch.y)


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.other, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.head((self.own(nodes) + edges @ self.other(nodes) / 8).relu().mean(1))


class Detector(Base):
    """Pictures with lists of boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.boxes = nn.Linear(32, 4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))

    def loss(self, batch: Any) -> Tensor:
        images, boxes = batch
        found = self.boxes(self.backbone(images).flatten(1))
        return torch.stack([(wanted - one).abs().mean() for one, wanted in zip(found, boxes, strict=True)]).mean()


class TabularSeries(Base):
    """A recurrent net with attention over dicts of past values and static features."""

    def __init__(self) -> None:
        super().__init__()
        self.tft = Temporal()

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.tft(batch), batch["future"])


class Temporal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.static, self.encoder = nn.Embedding(4, 16), nn.GRU(8, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        past, _ = self.encoder(batch["past"])
        query = self.static(batch["static"]).unsqueeze(1)
        return self.head(self.attention(query, past, past, need_weights=False)[0].squeeze(1))


class SemiSupervised(Classifier):
    """Two loaders at once, by a CombinedLoader."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        other = self.model(batch["other"][0])
        return self.loss(batch["labelled"]) + 0.1 * (other - other.mean(0)).square().mean()


class SeveralSets(Classifier):
    """Two validation sets."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(f"set_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)
        self.log("val_loss", self.loss(batch), add_dataloader_idx=False) if dataloader_idx == 0 else None


class QuasiNewton(Classifier):
    """LBFGS, which calls the step several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Tied(Base):
    """One weight for embedding and output, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = TiedBody()

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["input_ids"]
        return F.cross_entropy(self.lm(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


class TiedBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense, self.out = nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("places", torch.linspace(-1, 1, 8).view(8, 1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places[: tokens.shape[1]]
        return self.out(self.dense(x).tanh())


class FineTuned(Convolutional):
    """A frozen backbone in eval mode under a trained head, which alone is in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.backbone.eval()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.head.parameters(), lr=0.01)


class Scheduled(Classifier):
    """A schedule per step, callbacks, checkpoint keys and predictions of its own; a layer is made late."""

    seen = 0

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Linear(4, 4)

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self.late(self.model(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_callbacks(self) -> list[Callback]:
        return [Counting()]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        logits = self.late(self.model(batch[0]))
        return {"class": logits.argmax(1), "logits": logits}


class Counting(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.seen += 1


class Player(Base):
    """Values of actions against a target net that is copied now and then, from an IterableDataset."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
        self.target = copy.deepcopy(self.values).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        state, action = batch
        reward = 1 + 0.9 * self.target(state.flip(-1)).amax(1)
        return F.smooth_l1_loss(self.values(state).gather(1, action.view(-1, 1))[:, 0], reward)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            self.target.load_state_dict(self.values.state_dict())
