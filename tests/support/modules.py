"""Small LightningModules in the styles that are public: what a batch is, what a step calls, how it is optimized."""

import copy
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH = 40, 8


class Generated(Dataset[Any]):
    """Samples of one kind: image, text, views or sequence."""

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
        return self.images[row], self.y[row]


class Data(LightningDataModule):
    def __init__(self, kind: str = "image") -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        return DataLoader(Generated(self.kind), BATCH, generator=torch.Generator())  # no draw of the global one

    val_dataloader = train_dataloader


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
