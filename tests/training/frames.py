"""A data frame with the part of pandas' interface that fnet uses, for environments without pandas."""

import numpy as np


class Series:
    def __init__(self, values, dtype=None):
        self.values = np.asarray(values)
        self.dtype = self.values.dtype if dtype is None else dtype
        self.iloc = Rows(self)

    def __len__(self):
        return len(self.values)

    def isna(self):
        return np.array([value is None or value != value for value in self.values])

    def to_numpy(self, dtype=None):
        return self.values if dtype is None else self.values.astype(dtype)

    def rows(self, rows):
        return Series(self.values[rows], self.dtype)


class DataFrame:
    def __init__(self, data):
        self.data = {
            name: column if isinstance(column, Series) else Series(column)
            for name, column in data.items()
        }
        self.columns = list(data)
        self.iloc = Rows(self)

    def __len__(self):
        return len(next(iter(self.data.values())))

    def __getitem__(self, name):
        if isinstance(name, list):
            return DataFrame({each: self.data[each] for each in name})
        return self.data[name]

    def rows(self, rows):
        return DataFrame({name: column.rows(rows) for name, column in self.data.items()})


class Rows:
    def __init__(self, of):
        self.of = of

    def __getitem__(self, rows):
        return self.of.rows(rows)


class Categories:
    categories = ("a", "b")


def Categorical(values):
    return Series(values, Categories())
