//! Random damage to headers and configurations: an error or a sound result, never a panic, and no more memory than the
//! input explains.

use std::sync::LazyLock;

use proptest::prelude::*;
use troika_base::SharedBytes;
use troika_graph::WeightSource;
use troika_model::checkpoint::safetensors::{Dtype, read_header};
use troika_model::{Checkpoint, ConfigFile, ScaleCheck, WeightTable};

use crate::support::{Parts, decode, oracle, safetensors, with_header};

/// One change to a byte string. Places are fractions of its length.
#[derive(Clone, Debug)]
enum Damage {
    Set { at: f64, byte: u8 },
    Flip { at: f64, bit: u8 },
    Insert { at: f64, bytes: Vec<u8> },
    Remove { at: f64, len: usize },
    Repeat { at: f64, len: usize },
    Truncate { at: f64 },
}

fn damage() -> impl Strategy<Value = Damage> {
    // Bytes that mean something in JSON break it in more interesting ways than others.
    let byte = prop_oneof![proptest::sample::select(b"0123456789-+.eE\"[]{},:\\ \xff\x00".to_vec()), any::<u8>()];
    let at = 0.0..1.0f64;
    prop_oneof![
        (at.clone(), byte.clone()).prop_map(|(at, byte)| Damage::Set { at, byte }),
        (at.clone(), 0..8u8).prop_map(|(at, bit)| Damage::Flip { at, bit }),
        (at.clone(), proptest::collection::vec(byte, 1..12)).prop_map(|(at, bytes)| Damage::Insert { at, bytes }),
        (at.clone(), 1..40usize).prop_map(|(at, len)| Damage::Remove { at, len }),
        (at.clone(), 1..120usize).prop_map(|(at, len)| Damage::Repeat { at, len }),
        at.prop_map(|at| Damage::Truncate { at }),
    ]
}

fn apply(bytes: &mut Vec<u8>, damages: &[Damage]) {
    for damage in damages {
        let place = |at: f64| (at * bytes.len() as f64) as usize;
        match damage {
            Damage::Set { at, byte } => {
                let place = place(*at);
                if let Some(old) = bytes.get_mut(place) {
                    *old = *byte;
                }
            }
            Damage::Flip { at, bit } => {
                let place = place(*at);
                if let Some(old) = bytes.get_mut(place) {
                    *old ^= 1 << bit;
                }
            }
            Damage::Insert { at, bytes: new } => {
                let place = place(*at);
                bytes.splice(place..place, new.iter().copied());
            }
            Damage::Remove { at, len } => {
                let place = place(*at);
                bytes.drain(place..(place + len).min(bytes.len()));
            }
            Damage::Repeat { at, len } => {
                let place = place(*at);
                let part = bytes[place..(place + len).min(bytes.len())].to_vec();
                bytes.splice(place..place, part);
            }
            Damage::Truncate { at } => bytes.truncate(place(*at)),
        }
    }
}

static TINY_CONFIG: LazyLock<String> = LazyLock::new(|| Parts::read(&oracle("tiny")).config.to_string());
static MLX: LazyLock<Parts> = LazyLock::new(|| Parts::read(&oracle("tiny-mlx")));

/// The start of `tiny-mlx`: header and a little of the data; small, so that thousands of cases are quick.
static SMALL_FILE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut tensors = MLX.tensors.clone();
    tensors.retain(|name, _| name.contains("norm") || name.contains("sink"));
    safetensors(&tensors)
});

/// Where the JSON of a file ends.
fn header_end(file: &[u8]) -> usize {
    8 + u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_give_entries_inside_the_file(damages in proptest::collection::vec(damage(), 1..4)) {
        let mut file = SMALL_FILE.clone();
        apply(&mut file, &damages);
        check_entries(&file)?;
    }

    /// The length is set right again, so that the damage reaches the JSON reader.
    #[test]
    fn damaged_headers_give_entries_inside_the_file(damages in proptest::collection::vec(damage(), 1..4)) {
        let (header, data) = SMALL_FILE.split_at(header_end(&SMALL_FILE));
        let mut header = header[8..].to_vec();
        apply(&mut header, &damages);
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(&header);
        file.extend_from_slice(data);
        check_entries(&file)?;
    }

    #[test]
    fn any_header_is_survived(header in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(&header);
        check_entries(&file)?;
    }

    #[test]
    fn damaged_configs_are_survived(damages in proptest::collection::vec(damage(), 1..4)) {
        let mut text = TINY_CONFIG.clone().into_bytes();
        apply(&mut text, &damages);
        if let Ok(config) = ConfigFile::from_json(&String::from_utf8_lossy(&text)) {
            check_sizes(&config);
        }
    }

    /// Any value at all under any key.
    #[test]
    fn odd_values_in_configs_are_survived(key in any::<proptest::sample::Index>(), value in odd_value()) {
        let mut config: serde_json::Value = serde_json::from_str(&TINY_CONFIG).expect("sound");
        let map = config.as_object_mut().expect("an object");
        let key = map.keys().nth(key.index(map.len())).expect("a key").clone();
        map.insert(key, value);
        if let Ok(config) = ConfigFile::from_json(&config.to_string()) {
            check_sizes(&config);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// A header that is sound but for one tensor: another dtype, another shape, another name.
    #[test]
    fn odd_tensors_are_survived(
        tensor in any::<proptest::sample::Index>(),
        dtype in proptest::sample::select(vec![Dtype::U8, Dtype::U32, Dtype::I8, Dtype::F8_E4M3, Dtype::BF16, Dtype::F32]),
        shape in proptest::collection::vec(0..300usize, 0..4),
        config_damage in proptest::option::of(odd_value()),
    ) {
        let mut parts = MLX.clone();
        let name = parts.tensors.keys().nth(tensor.index(parts.tensors.len())).expect("a tensor").clone();
        let mut shape = shape;
        while shape.iter().product::<usize>() > 1 << 18 {
            shape.pop();
        }
        let bytes = shape.iter().product::<usize>() * dtype.bits() as usize / 8;
        let raw = parts.tensor(&name);
        (raw.dtype, raw.shape) = (dtype, shape);
        raw.bytes.resize(bytes, 7);
        if let Some(value) = config_damage {
            let module = name.rsplit_once('.').map_or("x", |(module, _)| module);
            parts.config["quantization"][module] = value;
        }
        check_table(&parts)?;
    }
}

fn odd_value() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::json;
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(|x| json!(x)),
        any::<i64>().prop_map(|x| json!(x)),
        any::<u64>().prop_map(|x| json!(x)),
        (0..300u64).prop_map(|x| json!(x)),
        any::<f64>().prop_map(|x| json!(x)),
        "[a-z]{0,6}".prop_map(|x| json!(x)),
    ];
    leaf.prop_recursive(3, 8, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(|x| json!(x)),
            proptest::collection::btree_map("bits|mode|group_size|type|factor", inner, 0..4).prop_map(|x| json!(x)),
        ]
    })
}

/// Whatever the header reader lets through is inside the file and as long as its shape says.
fn check_entries(file: &[u8]) -> Result<(), TestCaseError> {
    let Ok(entries) = read_header(file) else { return Ok(()) };
    prop_assert!(entries.len() <= file.len() / 40, "more entries than the header has room for");
    for entry in entries {
        let bytes = file.get(entry.bytes.clone());
        prop_assert!(bytes.is_some(), "{entry:?} is outside the file");
        let elements = entry.shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
        if let Some(elements) = elements {
            prop_assert_eq!((elements as u64 * entry.dtype.bits()).div_ceil(8), entry.bytes.len() as u64);
        }
    }
    Ok(())
}

/// Whatever the configuration reader lets through has shapes whose products fit.
fn check_sizes(config: &ConfigFile) {
    use troika_model::checkpoint::layout::{MODEL_ROLES, form, layer_roles};
    let model = &config.model;
    let layers = 0..model.num_hidden_layers.min(8) as u16;
    let keys = layers.flat_map(|layer| {
        layer_roles(model, layer, true).into_iter().map(move |role| troika_graph::WeightKey::layer(layer, role))
    });
    for key in keys.chain(MODEL_ROLES.iter().map(|&role| troika_graph::WeightKey::model(role))) {
        let [rows, cols] = form(model, key).dims();
        let bytes = rows.checked_mul(cols).and_then(|elements| elements.checked_mul(8));
        assert!(bytes.is_some_and(|bytes| bytes > 0 && bytes < 1 << 50), "{key} is [{rows}, {cols}]");
    }
}

fn check_table(parts: &Parts) -> Result<(), TestCaseError> {
    let file = SharedBytes::new(safetensors(&parts.tensors));
    let opened = Checkpoint::from_parts(&parts.config.to_string(), &[("model.safetensors".to_owned(), file)]);
    let Ok(checkpoint) = opened else { return Ok(()) };
    if let Ok(weights) = WeightTable::build(&checkpoint, ScaleCheck::All) {
        for key in weights.keys() {
            let tensor = weights.tensor(key).expect("listed");
            prop_assert!(tensor.num_bytes() > 0, "{key}");
        }
        let some = weights.keys().into_iter().step_by(17);
        for tensor in some.filter_map(|key| weights.tensor(key)) {
            prop_assert_eq!(decode(&tensor).len(), tensor.rows() * tensor.cols());
        }
    }
    Ok(())
}

/// Deep nesting must not overflow the stack, nor long lists claim memory.
#[test]
fn deep_and_long_json_is_survived() {
    let deep = "[".repeat(100_000);
    assert!(read_header(&with_header(&format!("{{\"__metadata__\": {deep}"))).is_err());
    assert!(read_header(&with_header(&format!("{{\"a\": {{\"dtype\": {deep}"))).is_err());
    assert!(ConfigFile::from_json(&format!("{{\"quantization\": {deep}")).is_err());
    let long = "1,".repeat(1_000_000);
    assert!(read_header(&with_header(&format!("{{\"a\": {{\"shape\": [{long}1]}}}}"))).is_err());
}
