//! `troika tune`: a search through real processes, going on from a journal, and what takes its file.

use serde_json::Value;

use crate::support::{Scratch, troika};

/// Little of everything, on nano.
const SHORT: [&str; 15] = [
    "tune",
    "--npu",
    "soft:cores=1",
    "--threads",
    "1",
    "--tile",
    "64",
    "--chunk",
    "64",
    "--tiles",
    "1",
    "--rounds",
    "3",
    "--modes",
    "overlap",
];

fn read(path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).expect("written")).expect("JSON")
}

#[test]
fn a_tuning_is_written_continued_and_used_for_what_it_holds() {
    let scratch = Scratch::new();
    let (out, plans) = (scratch.arg("tuned.json"), scratch.arg("plans"));
    let args = [&SHORT[..], &["--plan-dir", &plans, "--out", &out, "--explain"]].concat();
    let page = troika(&args).ok().stdout;
    for part in ["nano", "Kind by kind", "wq_b: ", "each kind alone", "matched", "recommended", "written to"] {
        assert!(page.to_lowercase().contains(&part.to_lowercase()), "no `{part}` in:\n{page}");
    }
    let mut file = read(&out);
    assert_eq!((file["schema"].as_str(), file["source"].as_str()), (Some("troika-tuning"), Some("measured")));
    let verified = file["outcome"]["verified"].as_array().expect("arms");
    assert_eq!((verified[0]["name"].as_str(), verified[1]["name"].as_str()), (Some("stock"), Some("matched")));
    assert!(verified.iter().all(|arm| arm["void"].is_null()), "everything that was planned ran: {verified:?}");
    let kinds = file["outcome"]["kinds"].as_object().expect("kinds");
    assert_eq!(kinds.len(), 8, "{:?}", kinds.keys());
    // The same again finds every answer in the journal, so that it says the same to the last digit.
    let journal = std::fs::read(format!("{out}.journal")).expect("written");
    let said = troika(&args).ok().stderr;
    assert!(said.contains("nothing was measured") && said.contains("tuned.json.journal; remove it"), "{said}");
    assert_eq!(std::fs::read(format!("{out}.journal")).expect("written"), journal, "something was asked again");
    let again = read(&out);
    assert_eq!(again["outcome"], file["outcome"]);
    // For other threads the journal does not hold.
    let other = [&args[..3], &["--threads", "2"], &args[5..]].concat();
    troika(&other).fails(1, &["journal", "holds for"]);

    // What would be used if this had been found.
    let place: serde_json::Map<String, Value> =
        kinds.keys().map(|kind| (kind.clone(), if kind == "shared" { "whole" } else { "primary" }.into())).collect();
    file["settings"] = serde_json::json!({
        "tile": 64, "tail": 0, "wavefront": 2, "place": place, "digest": null, "primary_tps": 1.0, "hybrid_tps": 2.0
    });
    let found = scratch.write("found.json", file.to_string().as_bytes());
    let bench = ["bench", "in-process", "--prompt-lengths", "129", "--rounds", "1", "--generate", "2", "--chunk", "64"];
    let json = ["--json", "-", "--require-engaged", "--tuning", &found];
    let report = troika(&[&bench[..], &["--threads", "1"], &json].concat()).ok().json();
    assert_eq!((report["hybrid"]["state"].as_str(), report["wavefront"].as_u64()), (Some("engaged"), Some(2)));
    let plan = report["hybrid"]["plan"].as_object().expect("a plan");
    assert_eq!(plan.keys().collect::<Vec<_>>(), ["shared expert"]);
    // For anything else it is refused, naming what differs.
    let threads = troika(&[&bench[..], &["--threads", "2"], &json].concat());
    threads.fails(1, &["found.json", "threads beside the engines: 1 in the file, 2 here", "troika tune"]);
    let model = scratch.arg("model");
    troika(&["run", "x", "-n", "1", "--model", &model, "--threads", "1", "--tuning", &found]).fails(1, &["weights"]);
    troika(&["serve", "--port", "0", "--npu", "soft", "--tuning", &found]).fails(2, &["--tuning", "--npu"]);
    let compared = ["bench", "--prompt-lengths", "129", "--fit", "natural", "--rounds", "3", "--max-rounds", "3"];
    let few = [
        "--repeats",
        "1",
        "--min-sample-ms",
        "0",
        "--generate",
        "2",
        "--chunk",
        "64",
        "--tuning",
        &found,
        "--require-engaged",
    ];
    let table = troika(&[&compared[..], &few].concat()).ok().stdout;
    assert!(table.contains("hybrid as tuned, soft:cores=1") && table.contains("soft"), "{table}");
}

#[test]
fn a_prediction_says_so_and_no_server_takes_it() {
    let scratch = Scratch::new();
    let out = scratch.arg("prediction.json");
    let simulate = ["tune", "--simulate", "m3-ultra-512", "--modes", "split", "--tiles", "1", "--rounds", "3"];
    let page = troika(&[&simulate[..], &["--out", &out]].concat()).ok().stdout;
    assert!(page.starts_with("PREDICTION, nothing was measured"), "{page}");
    assert!(page.contains("PREDICTED prompt tokens") && !page.contains("measured ("), "{page}");
    assert_eq!(read(&out)["source"], "prediction");
    troika(&["serve", "--port", "0", "--tuning", &out]).fails(1, &["prediction.json", "is a prediction"]);
    troika(&["tune"]).fails(2, &["--npu"]);
    troika(&["tune", "--simulate", "m9"]).fails(1, &["m9", "m3-ultra-512"]);
    let mixed = ["tune", "--simulate", "m3-ultra-512", "--npu", "soft"];
    troika(&mixed).fails(2, &["--npu"]);
    troika(&["tune", "--npu", "soft", "--tiles", "1024"]).fails(1, &["--tiles 1024", "524800 are wanted"]);
    troika(&["tune", "--npu", "soft", "--modes", "split,wavefront"]).fails(1, &["wavefront needs overlap"]);
}

/// On a machine with two cores: the tuner's plan against every combination of a small grid, in turn. Run it with `cargo nextest
/// run --release -p troika --run-ignored only grid --no-capture`, on a quiet machine.
#[test]
#[ignore = "takes minutes and a quiet machine"]
fn the_plan_found_is_as_good_as_the_best_of_a_grid() {
    let scratch = Scratch::new();
    let out = scratch.arg("tuned.json");
    let tune = ["tune", "--npu", "soft:cores=1", "--threads", "1", "--tiles", "3", "--yes", "--out", &out, "--explain"];
    println!("{}", troika(&tune).ok().stdout);
    let mut variants: Vec<(String, Vec<String>)> = vec![("tuned".to_owned(), vec!["--tuning".to_owned(), out.clone()])];
    for shared in ["primary", "whole"] {
        for query in ["primary", "split:0.5", "whole"] {
            for output in ["primary", "split:0.5", "whole"] {
                for wavefront in ["1", "2"] {
                    let place = format!(
                        "shared={shared},wq_b={query},wo_a={output},wo_b={output},wq_a=primary,wkv=primary,\
                         compressor={query},indexer_compressor={query}"
                    );
                    let name = format!("{place} --wavefront {wavefront}");
                    let args = ["--npu", "soft:cores=1", "--hybrid", "on", "--place", &place, "--wavefront", wavefront];
                    if [shared, query, output] != ["primary"; 3] {
                        variants.push((name, args.map(str::to_owned).to_vec()));
                    }
                }
            }
        }
    }
    let mut rates = vec![Vec::new(); variants.len()];
    for round in 0..3 {
        let mut order: Vec<usize> = (0..variants.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for variant in order {
            // The tuned one is measured beside each, for some machines are faster for some seconds.
            let rate = |index: usize| {
                let args = variants[index].1.iter().map(String::as_str);
                let bench = ["bench", "in-process", "--threads", "1", "--prompt-lengths", "1537", "--rounds", "2"];
                let all: Vec<&str> = bench.into_iter().chain(["--generate", "2", "--json", "-"]).chain(args).collect();
                troika(&all).ok().json()["results"][0]["prefill_tps"].as_f64().expect("a rate")
            };
            let (own, tuned) = (rate(variant), rate(0));
            rates[variant].push(own / tuned);
        }
    }
    let mut medians: Vec<(f64, &str)> = rates
        .iter_mut()
        .zip(&variants)
        .map(|(ratios, (name, _))| {
            ratios.sort_by(f64::total_cmp);
            (ratios[ratios.len() / 2], name.as_str())
        })
        .collect();
    medians.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (ratio, name) in &medians {
        println!("{ratio:.3} of the tuned one: {name}");
    }
    assert!(medians[0].0 <= 1.03, "{} is {:.3} times as fast as the tuned plan", medians[0].1, medians[0].0);
}
