//! Samples of slow cases, drawn by a seed.
//!
//! `PAGURO_SAMPLE` is the seed, or `all`. Without it the seed is 0. `cargo xtask test` sets it to a hash of the crates.

/// Selection among slow cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draw {
    /// All of them.
    All,
    /// A sample, drawn by this seed.
    Seed(u64),
}

impl Draw {
    /// Name of the environment variable.
    pub const VARIABLE: &str = "PAGURO_SAMPLE";

    /// Reads the environment variable. For tests only: the program has its own settings.
    ///
    /// # Panics
    /// If it is neither a number nor `all`.
    pub fn from_env() -> Self {
        match std::env::var(Self::VARIABLE).as_deref() {
            Err(_) | Ok("") => Self::Seed(0),
            Ok("all") => Self::All,
            Ok(seed) => match seed.parse() {
                Ok(seed) => Self::Seed(seed),
                Err(_) => panic!("{} is `{seed}`: set it to a number or to `all`", Self::VARIABLE),
            },
        }
    }

    /// Returns `count` of the items in order, or all of them. `name` seeds the selection.
    pub fn some<T: Clone>(self, name: &str, items: &[T], count: usize) -> Vec<T> {
        let Self::Seed(seed) = self else { return items.to_vec() };
        let mut places: Vec<usize> = (0..items.len()).collect();
        places.sort_by_key(|place| hash(seed, &format!("{name} {place}")));
        places.truncate(count);
        places.sort_unstable();
        places.into_iter().map(|place| items[place].clone()).collect()
    }
}

/// FNV-1a of the text, mixed with the seed (Fowler, Noll, Vo; finalizer of SplitMix64).
pub fn hash(seed: u64, text: &str) -> u64 {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let mut x = text.bytes().fold(0xcbf2_9ce4_8422_2325, fnv) ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_item_is_drawn_by_some_seed() {
        let items: Vec<u32> = (0..16).collect();
        assert_eq!(Draw::All.some("items", &items, 2), items);
        assert_eq!(Draw::Seed(1).some("items", &items, 20), items);
        let drawn = |seed| Draw::Seed(seed).some("items", &items, 2);
        assert_eq!(drawn(7), drawn(7));
        let all: HashSet<u32> = (0..100).flat_map(drawn).collect();
        assert_eq!(all.len(), items.len());
    }
}
