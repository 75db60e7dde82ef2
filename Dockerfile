# Lathe on NVIDIA's PyTorch image, for machines with GPUs:
#   docker build -t lathe .
#   docker run --rm --gpus all --ipc=host -v "$PWD/logs:/lathe/logs" -v "$PWD/data:/lathe/data" lathe python train.py trainer=gpu
# Written without a Docker daemon at hand, so it has not been built yet.
#
# 26.05 has torch 2.12; 25.12 is still at 2.10, below the range in setup.cfg.
FROM nvcr.io/nvidia/pytorch:26.05-py3

WORKDIR /lathe
COPY requirements.txt ./
# The image's own torch and numpy belong to its CUDA libraries and stay. The image constrains everything else as well
# (PIP_CONSTRAINT);
# here only those two are held, and requirements.txt chooses the rest.
RUN pip list --format=freeze | grep -E '^(torch|numpy)==' > /tmp/keep.txt \
    && grep -vE '^(torch==|numpy==|setuptools==|-e )' requirements.txt > /tmp/rest.txt \
    && PIP_CONSTRAINT=/tmp/keep.txt pip install --no-cache-dir -r /tmp/rest.txt

COPY . .
# --no-deps: torch 2.12.0a0 of the image sorts below 2.12 for pip, and must not be replaced for that
RUN PIP_CONSTRAINT= pip install --no-cache-dir --no-deps -e . \
    && python -c "import torch; assert torch.version.cuda, 'the image lost its CUDA build of torch'"

CMD ["python", "train.py"]
