"""Operations whose derivatives torch loses, replaced by equal ones that keep them."""
