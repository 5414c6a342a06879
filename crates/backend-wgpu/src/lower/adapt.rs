//! Adapters (LoRA): a node before each matmul that some of them change, for the products with A. The matmul adds those with B.

use paguro_backend::{Adaptable, Linear, LoadError, MatrixId};

use super::{
    List,
    facts::Facts,
    kernels,
    node::{Kernel, Node},
    slot::{Sizes, Slot},
};
use crate::matrix::Order;

/// Matrices of a site, at most.
pub const MATRICES: usize = 4;

/// Joined matrices of a matmul that adapters can change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The matrices.
    pub matrices: Vec<MatrixId>,
    /// The order of their rows.
    pub order: Order,
}

/// The adapters of a runner, as far as launches depend on them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adapted {
    /// Sites that adapters change.
    pub sites: Vec<Site>,
    /// Largest sum of the ranks of a row's adapters.
    pub ranks: usize,
    /// Largest sum of the ranks of all rows of a step.
    pub low: usize,
    /// Tiles of 16 rows and 16 ranks, at most.
    pub tiles: usize,
    /// Words of the tables of a step's rows and of its outputs.
    pub words: [usize; 2],
}

impl Site {
    /// Returns true for the site of joined matrices.
    pub fn is_of(&self, linears: &[Linear], order: Order) -> bool {
        self.order == order && self.matrices.iter().copied().eq(linears.iter().map(|linear| linear.matrix))
    }
}

/// Returns all sites of a program whose matrices adapters can change.
///
/// # Errors
/// [`LoadError::Unsupported`]
pub fn sites(facts: &Facts<'_>, adaptable: &Adaptable) -> Result<Vec<Site>, LoadError> {
    let (lists, _) = super::lower(facts)?;
    let mut sites: Vec<Site> = Vec::new();
    for node in lists.iter().flat_map(|list| list.body.iter().chain(&list.head)) {
        let Kernel::Matmul(op) = &node.kernel else { continue };
        let matrices: Vec<_> = op.linears.iter().map(|linear| linear.matrix).collect();
        let site = Site { matrices, order: op.order };
        if site.matrices.iter().any(|&id| adaptable.shape(id).is_some()) && !sites.contains(&site) {
            sites.push(site);
        }
    }
    Ok(sites)
}

/// Adds the nodes.
pub fn adapt(facts: &Facts<'_>, list: &mut List) {
    for nodes in [&mut list.body, &mut list.head] {
        let mut adapted = Vec::with_capacity(nodes.len());
        for mut node in nodes.drain(..) {
            if let Kernel::Matmul(op) = &mut node.kernel {
                op.site = facts.site(&op.linears, op.order);
                adapted.extend(op.site.map(|_| Node::new(Kernel::Shrink(op.clone()))));
            }
            adapted.push(node);
        }
        *nodes = adapted;
    }
}

/// Enters the sizes of slots.
pub fn need(facts: &Facts<'_>, sizes: &mut Sizes) {
    let Some(Adapted { sites, ranks, low, tiles, words }) = facts.adapted else { return };
    // Those of a runner exist and are larger.
    for site in 0..sites.len() {
        sizes.need(Slot::A(site), 1);
        sizes.need(Slot::B(site), 1);
    }
    sizes.need(Slot::Adapted { of_outputs: false }, words[0]);
    sizes.need(Slot::Adapted { of_outputs: true }, words[1]);
    sizes.need(Slot::Low, MATRICES * low);
    if facts.target.handoff {
        // Steps of more rows have cooperative matrices.
        let few = ranks * (kernels::wide_rows(&facts.target) - 1);
        let low = if facts.target.cooperative.is_some() { few.min(*low) } else { *low };
        sizes.need(Slot::LowWords(0), MATRICES * low);
        sizes.need(Slot::LowWords(1), MATRICES * low);
    }
    if facts.target.cooperative.is_some() {
        sizes.need(Slot::LowHalves, MATRICES * tiles * 128);
    }
}
