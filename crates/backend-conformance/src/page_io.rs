//! Cases of pages whose bytes are copied to another load of the model.

use paguro_backend::{PageContent, PageId, WeightFormat};

use super::{
    DriveOptions, Driver, ModelShape, RandomModel, Rng, Subject, Verdict,
    compare::{Logits, same},
    exactness::{alone, busy, drawn},
    recurrent::hybrid,
};

/// A sequence continues, bit for bit, from pages that another load of the model has computed.
pub(super) fn exact(subject: &Subject) -> Verdict {
    for format in drawn(subject, "pages from outside", &[WeightFormat::F16, WeightFormat::Q8_0], 1) {
        goes_on(subject, &busy(format), 48)?;
        let shape = hybrid(format);
        let model = shape.build(21);
        if Driver::new(&*(subject.backend)(2), &model, &subject.exact_options()).is_ok() {
            goes_on(subject, &shape, 32)?;
        }
    }
    Ok(())
}

fn goes_on(subject: &Subject, shape: &ModelShape, prefix: usize) -> Verdict {
    let model = shape.build(21);
    let mut rng = Rng::new(21);
    let tokens = rng.tokens(prefix + 13, shape.vocab);
    let other = rng.tokens(40, shape.vocab);
    let expected = alone(subject, &model, &[tokens.clone(), other.clone()])?;
    let Some(bytes) = computed(subject, &model, &tokens, prefix)? else { return Ok(()) };

    // Another load, another place, and a neighbour that computes meanwhile.
    let options = DriveOptions { scatter: Some(9), stale: true, ..subject.exact_options() };
    let mut driver = Driver::new(&*(subject.backend)(2), &model, &options)?;
    let neighbour = driver.start(&other);
    driver.step(&[(neighbour, 33)])?;
    let heir = driver.import(&tokens, prefix, &bytes)?;
    let again = driver.export(heir)?.ok_or("the device has no page format any more")?;
    if again[0] != bytes[0] {
        return Err("pages do not have the bytes that were written to them".into());
    }
    driver.step(&[(heir, 5), (neighbour, 2)])?;
    driver.run(heir, 3)?;
    driver.run(neighbour, 4)?;
    let ours: Logits = [neighbour, heir].map(|id| driver.logits(id).1.to_vec()).to_vec();
    let expected = vec![expected[1].clone(), expected[0][prefix..].to_vec()];
    same(&format!("a prefix of {prefix} tokens from outside"), &ours, &expected)
}

/// Computes whole blocks of a prefix and returns their bytes, and those of the state after them. `None` if they cannot leave the
/// device.
fn computed(
    subject: &Subject,
    model: &RandomModel,
    tokens: &[u32],
    prefix: usize,
) -> Result<Option<[Vec<u8>; 2]>, String> {
    let mut driver = Driver::new(&*(subject.backend)(2), model, &subject.exact_options())?;
    let has_states = !model.program.state.is_empty();
    if has_states && !driver.saves_states() {
        println!("skipped: the device does not copy states into pages");
        return Ok(None);
    }
    // Block by block, so that windows release no pages before they are read.
    let owner = driver.start(&tokens[..prefix]);
    driver.step(&[(owner, prefix)])?;
    if has_states {
        driver.save_state(owner)?;
    }
    let Some(bytes) = driver.export(owner)? else {
        println!("skipped: the bytes of pages cannot leave the device");
        return Ok(None);
    };
    Ok(Some(bytes))
}

/// Pages that do not exist and buffers of another size are refused, and nothing is written.
pub(super) fn refusals(subject: &Subject) -> Verdict {
    let model = ModelShape::default().build(1);
    let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.options())?;
    let runner = driver.runner();
    let Some(format) = runner.page_format() else {
        println!("skipped: the bytes of pages cannot leave the device");
        return Ok(());
    };
    let pages = [PageId(1), PageId(2)];
    let mut before = vec![0; 2 * format.page_bytes];
    runner.read_pages(&pages, &mut before).map_err(|error| error.to_string())?;
    let bytes = vec![0x11; 2 * format.page_bytes];
    let beyond = [PageId(1), PageId(u32::MAX)];
    for (what, pages, bytes) in [
        ("a page that does not exist", &beyond[..], &bytes[..]),
        ("too few bytes", &pages[..], &bytes[1..]),
        ("too many bytes", &pages[..1], &bytes[..]),
    ] {
        if runner.write_pages(pages, bytes, PageContent::Kv { group: 0 }).is_ok() {
            return Err(format!("wrote {what}"));
        }
        if runner.read_pages(pages, &mut bytes.to_vec()).is_ok() {
            return Err(format!("read {what}"));
        }
    }
    let mut after = vec![0; 2 * format.page_bytes];
    runner.read_pages(&pages, &mut after).map_err(|error| error.to_string())?;
    if before != after {
        return Err("a refused write has changed pages".into());
    }
    // The first page of a write is not the second one's.
    let half = format.page_bytes;
    runner
        .write_pages(&[PageId(2)], &bytes[..half], PageContent::Kv { group: 0 })
        .map_err(|error| error.to_string())?;
    runner.read_pages(&pages, &mut after).map_err(|error| error.to_string())?;
    if after[..half] != before[..half] || after[half..] != bytes[half..] {
        return Err("a write to a page has gone to another one".into());
    }
    Ok(())
}
