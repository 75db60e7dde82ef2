from .measured import write as write
